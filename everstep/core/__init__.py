"""Judgement: pure functions over frozen records. No clock, network, subprocess or torch in here."""
