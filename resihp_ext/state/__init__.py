"""Who holds which piece of which logical tensor, who shares it, and who must send it. Pure data."""
