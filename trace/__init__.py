"""Everything that happens while training runs: capture, journal, export."""
