def score(response):
    return float("please" in response)
