"""kvroute inside engines that nobody here wrote; nothing of an engine is imported before it is used."""
