"""Other members: who is there, how to reach them, who may enter, whose turn it is."""
