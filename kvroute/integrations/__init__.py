"""kvroute inside other projects' engines; no engine is imported before it is used."""
