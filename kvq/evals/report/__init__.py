"""Reports about results: intervals, gates, comparisons, tables, plots and pages."""
