"""Surveys: every statistic of every head of a model over many texts, and the passages in which a head is strongest."""

from attention_client.survey.head_survey import Distribution, HeadSurvey, Passage, SurveyedHead, shipped_texts

__all__ = ["Distribution", "HeadSurvey", "Passage", "SurveyedHead", "shipped_texts"]
