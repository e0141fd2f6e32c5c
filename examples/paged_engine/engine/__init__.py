"""A small paged-attention engine for transformers' Mixture-of-Experts models. Needs torch: import its modules."""
