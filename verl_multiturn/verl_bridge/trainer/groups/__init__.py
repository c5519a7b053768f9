"""Groups that come into a step: replay buffers, filters, late groups."""
