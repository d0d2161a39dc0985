"""What only MXFP8 and NVFP4 need: 128x4 tiles of scales, the randomised Hadamard transform."""
