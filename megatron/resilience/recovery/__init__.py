"""How a rank survives the death of another one: stop what hangs, agree, go on in the next plan."""
