// SPDX-License-Identifier: Apache-2.0
// Checks that a tokenizer has no more words than the model: the largest ids in tokenizer.json and added_tokens.json
// next to a config.
#pragma once

#include <string>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/base/result.h"

namespace reshard {

struct TokenizerAudit {
  Index tokens = 0;               // tokens checked
  std::string skipped;            // why it was skipped, a clause
  std::vector<Finding> findings;  // "tokenizer-larger" (warning)
};

// `directory` contains the tokenizer, `config_path` is the source of vocab_size.
TokenizerAudit audit_tokenizer(const std::string& directory, const std::string& config_path, Index vocab_size);

}  // namespace reshard
