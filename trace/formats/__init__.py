"""Trajectories from elsewhere than a store."""
