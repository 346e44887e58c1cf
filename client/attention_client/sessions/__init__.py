"""Decode sessions that outlive the server's memory of them: sessions with replay, and streams of steps."""
