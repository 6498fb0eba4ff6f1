"""What a daemon serves: hostings, sessions and lanes of other peers, and how it checks other servers."""
