"""The HTTP gateway: OpenAI's dialect, and those of vLLM and SGLang, over a rollout and a scorer.

    python -m isobit.gateway --rollout 127.0.0.1:7001 --scorer 127.0.0.1:7002 --model models/my-model

docs/http.md says what each path takes and gives. isobit.gateway.core is what the dialects are written over.
"""
