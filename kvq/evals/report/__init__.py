"""Reports of results: intervals, gates, comparisons, tables, plots and pages."""
