"""How a posterior predicts: what the input may be, the model under drawn weights, and the model linearised."""
