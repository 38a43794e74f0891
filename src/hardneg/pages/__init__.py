"""HTML pages and SVG charts, shared by audits and reports."""
