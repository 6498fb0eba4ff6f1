"""What a swarm would do with the machines, links and habits that its founder expects: the product's own decisions, in
an event-driven model of time."""
