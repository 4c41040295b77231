"""Trackway inside of frameworks that run agents in their own way."""
