"""The HTTP gateway: the APIs of OpenAI, vLLM and SGLang, in front of a rollout and a scorer.

    python -m isobit.gateway --rollout 127.0.0.1:7001 --scorer 127.0.0.1:7002 --model models/my-model

docs/http.md describes what each path takes and returns. isobit.gateway.core is the base of all these
dialects.
"""
