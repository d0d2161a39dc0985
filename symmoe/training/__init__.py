"""What a training loop needs in addition to the layer: gradients, LoRA, metrics, replay of routing, memory.

May use the layer. Begin with `gradients`.
"""
