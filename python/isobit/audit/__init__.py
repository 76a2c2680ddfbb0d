"""Audits of recordings: what a rollout sampled, computed again and compared bit by bit."""
