"""Teams of several machines, the daemons' part: who follows whom, and where workers find each other."""
