#include "lib/convert/weights/module_pattern.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/must.h"

namespace reshard::module_pattern_test {
namespace {

const std::string kModule = "model.layers.10.self_attn.q_proj";

// Returns the result of re.match(rf"(.*\.)?({key})$", kModule).
TEST(ModulePattern, MeansWhatPythonFinds) {
  for (const char* key :
       {"q_proj", "self_attn.q_proj", "model.layers.10.self_attn.q_proj", "^model.layers.10.self_attn.q_proj",
        "model.layers.1..self_attn.q_proj", ".*q_proj", ".*", "layers\\.10\\.self_attn\\.q_proj", "layers.\\d+.*proj",
        "1*0.self_attn.q_proj", "x?self_attn.q_proj", "model.*", "\\d\\d.self_attn.._proj", "10.+", "q.*j"})
    EXPECT_TRUE(must(ModulePattern::parse(key)).matches(kModule)) << key;
  for (const char* key :
       {"proj", "_proj", "k_proj", "q_pro", "q_proj.", "0.self_attn.q_proj", "layers.1.self_attn.q_proj",
        "^layers.10.self_attn.q_proj", "^q_proj", "attn.q_proj", "", "\\d.self_attn.q_proj", "Q_proj",
        "layers.\\d.self_attn.q_proj", "q_+proj.", "11*0.self_attn.q_projj", "model\\.layers"})
    EXPECT_FALSE(must(ModulePattern::parse(key)).matches(kModule)) << key;
  EXPECT_TRUE(must(ModulePattern::parse("lm_head")).matches("lm_head"));
  EXPECT_FALSE(must(ModulePattern::parse("lm_head")).matches("xlm_head"));
}

TEST(ModulePattern, RefusesWhatItDoesNotKnow) {
  for (const char* key :
       {"(q|k)_proj", "[qk]_proj", "q_proj$", "q_proj|k_proj", "q{2}", "\\w+", "q_proj\\", "*q", "q**"})
    EXPECT_FALSE(ModulePattern::parse(key)) << key;
}

// The time is at most the product of the pattern's steps and the name's length.
TEST(ModulePattern, IsNotSlow) {
  std::string key;
  for (int i = 0; i < 200; ++i) key += ".*";
  EXPECT_FALSE(must(ModulePattern::parse(key + "!")).matches(std::string(500, 'a')));
}

}  // namespace
}  // namespace reshard::module_pattern_test
