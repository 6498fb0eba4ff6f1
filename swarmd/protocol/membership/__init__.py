"""Who is a member: keys, invites, charters, the catalog, and the records that members sign."""
