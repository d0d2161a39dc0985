"""Trainers that symmoe plugs into. A module here imports its trainer; nothing else of symmoe does."""
