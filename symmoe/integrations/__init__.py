"""Trainers that symmoe plugs into: FSDP2 and DDP, Megatron-Core, transformers, accelerate, Lightning, peft, torchtitan.

A module here imports its trainer; nothing else of symmoe does. Begin with the trainer's own folder or file.
"""
