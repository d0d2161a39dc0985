"""Integrations with trainers: FSDP2 and DDP, Megatron-Core, transformers, accelerate, Lightning, peft, torchtitan.

Only these modules of symmoe import trainers. Start with the trainer's own folder or file.
"""
