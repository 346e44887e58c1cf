"""Pictures of replies: figures by matplotlib, and maps for notebooks. Reached by entry points."""
