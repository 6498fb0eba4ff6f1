"""The state folder of one member: its paths, its membership, what its founder may do, and its models."""
