"""Router, grouped expert MLP, the MoE layer, and what a trainer needs around them."""
