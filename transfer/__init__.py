"""Moving block rows between processes. Prefill/decode sessions and links live here."""
