"""Integrations with RL frameworks: docs/integrations.md. Each module says which framework it needs."""
