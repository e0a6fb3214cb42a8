"""Everything that produces artifacts. Nothing at run time imports it."""
