// Checkpoints that Megatron-LM wrote, for the tests of formats/megatron.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "formats/open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/temp_dir.h"

namespace reshard {

// Saves of Megatron-LM itself: 0.11.0 (flat), 0.16.1, and 0.20.0 (moe_mixed).
inline constexpr const char* kReal[] = {"legacy_pp2_vpp2_dp2_distopt_tied",
                                        "legacy_tp2_ep2_moe_plain",
                                        "dist_tp2_dp2_dpreshardable",
                                        "dist_tp2_optim",
                                        "dist_old_tp2_dp2_flat",
                                        "dist_new_moe_mixed"};
inline constexpr const char* kIteration = "/iter_0000010";

inline std::string error_of(const std::string& path, const OpenOptions& options = {}) {
  const auto open = open_checkpoint(path, options);
  return open ? "" : shortened(open.error().message(), path);
}

// A test with a directory for copies of them.
class MegatronFiles : public testing::Test {
 protected:
  std::string copy(const std::string& name) {
    const std::string path = dir_ / name;
    std::filesystem::copy(test_data("megatron/" + name), path, std::filesystem::copy_options::recursive);
    return path;
  }
  const TempDir dir_;
};

}  // namespace reshard
