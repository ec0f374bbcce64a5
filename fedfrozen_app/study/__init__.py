"""A survival study over sites: what is asked of a site, what it answers, and what all answers say
together."""
