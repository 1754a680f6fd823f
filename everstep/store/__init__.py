"""Bytes: atomic writes, digests, manifests and tiers. No torch and no Prefect in here."""
