"""A demonstration: a small paged engine with kvroute embedded, a judge of its rows, two demos and two HTTP servers.

It runs small transformers models with seeded weights, so their text makes no sense. The product does not import it.
"""
