"""The demo through prefill, decode and route as processes of their own: every row that crossed is judged."""
