"""Perplexity at long context: which tokens are scored, with how much context, and how well."""
