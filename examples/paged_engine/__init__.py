"""A demonstration: a small paged engine with kvroute embedded, its judge, its demos and its two HTTP servers.

It runs small models of transformers with seeded weights, so what they say makes no sense. Nothing of the product
imports it.
"""
