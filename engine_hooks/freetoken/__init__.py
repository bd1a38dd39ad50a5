"""The hook of FreeToken (``ft serve``, ``freetoken.llm.LLM``)."""
