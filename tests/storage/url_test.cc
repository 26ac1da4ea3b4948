// Tests the parts of URLs.
#include "lib/base/storage/url.h"

#include <gtest/gtest.h>

namespace reshard::url_test {
namespace {

TEST(Urls, AreCutIntoRootAndKey) {
  const struct {
    std::string url, root, key;
    bool is_directory;
  } kCases[] = {{"s3://b", "s3://b", "", false},
                {"s3://b/", "s3://b", "", true},
                {"s3://b/a/c/", "s3://b", "a/c", true},
                {"hf://o/m", "hf://o/m", "", false},
                {"hf://o/m@main/a/b", "hf://o/m@main", "a/b", false},
                {"hf://o/m@refs/pr/7/a", "hf://o/m@refs/pr/7", "a", false},
                {"hf://datasets/o/d/a", "hf://datasets/o/d", "a", false},
                {"https://h:8/x y", "https://h:8", "x y", false}};
  for (const auto& [url, root, key, is_directory] : kCases) {
    const Url got = parse_url(url);
    EXPECT_EQ(got.root, root) << url;
    EXPECT_EQ(got.key, key) << url;
    EXPECT_EQ(got.is_directory, is_directory) << url;
  }
  for (const char* path : {"s3", "s3:/b", "./s3://b", "ftp://h/x", "/s3://b", "S3://b"})
    EXPECT_FALSE(is_url(path)) << path;
  EXPECT_EQ(percent_decode(percent_encode("a b/\xc3\xa9+=%", false)), "a b/\xc3\xa9+=%");
}

}  // namespace
}  // namespace reshard::url_test
