// Whether a tokenizer speaks of no more words than the model has: the largest ids of tokenizer.json and
// added_tokens.json beside a config.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/result.h"

namespace reshard {

struct TokenizerAudit {
  Index tokens = 0;               // looked at
  std::string skipped;            // why it was not made, a clause
  std::vector<Finding> findings;  // "tokenizer-larger" (warning)
};

// `directory` has the tokenizer, `config_path` is where vocab_size was read.
TokenizerAudit audit_tokenizer(const std::string& directory, const std::string& config_path, Index vocab_size);

}  // namespace reshard
