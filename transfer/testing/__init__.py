"""The contract of links, as a test class for authors of a link."""
