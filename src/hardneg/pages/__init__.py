"""HTML pages and SVG charts, shared by audits and reports.

``render`` fills the templates, ``charts`` draws figures as inline SVG, ``graph_drawing`` draws small graphs and
thumbnails of images. Pages load nothing; ``page.js``, their only script, sorts tables.
"""
