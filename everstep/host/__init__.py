"""Hands: processes, the copier, MLflow, the ledger. No Prefect in here."""
