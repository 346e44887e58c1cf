"""The sources of an answer as a prompt whose parts are highlighted: as HTML, as SVG, and for a terminal."""
