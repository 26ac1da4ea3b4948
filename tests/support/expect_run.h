// What tests expect of a run of the program.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/run_command.h"

namespace reshard {

inline CommandResult convert_quietly(const std::string& from, const std::string& to,
                                     const std::vector<std::string>& options) {
  return reshard_cli({"convert", from, to, "-q"}, options);
}

inline void expect_success(const CommandResult& r) { ASSERT_EQ(r.exit_code, 0) << r.out << r.err; }

inline void expect_refusal(const CommandResult& r, int code, const testing::Matcher<std::string>& message) {
  EXPECT_EQ(r.exit_code, code) << r.out << r.err;
  EXPECT_THAT(r.err, message);
}

}  // namespace reshard
