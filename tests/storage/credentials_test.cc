// Tests the keys that are found, and the signatures that are made with them.
#include "lib/base/storage/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lib/base/storage/sha256.h"
#include "tests/support/temp_dir.h"

namespace reshard::credentials_test {
namespace {

using testing::HasSubstr;

// The example in AWS's documentation of Signature Version 4 for S3: a GET of a range of test.txt.
TEST(Signatures, AreThoseOfTheDocumentation) {
  S3Access access;
  access.key_id = "AKIAIOSFODNN7EXAMPLE";
  access.secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
  access.region = "us-east-1";
  HttpHeaders headers = {{"host", "examplebucket.s3.amazonaws.com"}, {"range", "bytes=0-9"}};
  sign_s3(access, {"GET", "/test.txt", "", to_hex(sha256(""))}, 1369353600, headers);
  EXPECT_EQ(headers.back().first, "authorization");
  EXPECT_THAT(headers.back().second,
              HasSubstr("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"));
}

// RFC 4231, test cases 1 and 6.
TEST(Signatures, HashAsTheRfcDoes) {
  EXPECT_EQ(to_hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(to_hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Profiles, AreThoseOfTheAwsTools) {
  const TempDir home;
  home.write(".aws/credentials",
             "[default]\naws_access_key_id = A\naws_secret_access_key=B\n\n[other]\n# x\n"
             "aws_access_key_id=C\naws_secret_access_key=D==\naws_session_token=E\n");
  home.write(".aws/config",
             "[default]\nregion = eu-west-3\ns3 =\n  addressing_style = path\n[profile other]\n"
             "endpoint_url = http://h:9000/\n");
  const auto read = [&](const char* profile) {
    for (const char* name : {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
                             "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"})
      ::unsetenv(name);
    ::setenv("AWS_SHARED_CREDENTIALS_FILE", (home / ".aws/credentials").c_str(), 1);
    ::setenv("AWS_CONFIG_FILE", (home / ".aws/config").c_str(), 1);
    ::setenv("AWS_PROFILE", profile, 1);
    auto access = s3_access();
    for (const char* name : {"AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_PROFILE"}) ::unsetenv(name);
    return access;
  };
  const auto usual = read(""), other = read("other"), none = read("none");
  ASSERT_TRUE(usual && other);
  EXPECT_EQ(usual->key_id + usual->secret + usual->region, "ABeu-west-3");
  EXPECT_EQ(other->key_id + other->secret + other->session_token + other->endpoint, "CD==Ehttp://h:9000");
  EXPECT_FALSE(none);
}

}  // namespace
}  // namespace reshard::credentials_test
