"""Audits recordings: computes again what a rollout sampled, and compares it bit by bit."""
