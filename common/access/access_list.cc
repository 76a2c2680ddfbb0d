// Reads access files, watches them for changes, and finds clients in them.
#include "common/access/access_list.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxNameBytes = 256;

TokenHash HashOf(absl::string_view token) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

absl::Status Expected(const std::string& where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": expected ", what));
}

absl::StatusOr<std::string> StringOf(const Json& value, const std::string& where) {
  if (!value.is_string()) return Expected(where, "a string");
  const auto& text = value.get_ref<const std::string&>();
  if (text.empty() || text.size() > kMaxNameBytes ||
      !std::all_of(text.begin(), text.end(), absl::ascii_isprint)) {
    return Expected(where, absl::StrCat("1 to ", kMaxNameBytes, " printable ASCII characters"));
  }
  return text;
}

// The strings of the array `client`[`field`]; none if there is no such field.
absl::StatusOr<std::vector<std::string>> StringsOf(const Json& client, const char* field,
                                                   const std::string& where) {
  std::vector<std::string> strings;
  const auto found = client.find(field);
  if (found == client.end()) return strings;
  const std::string place = absl::StrCat(where, ".", field);
  if (!found->is_array()) return Expected(place, "an array of strings");
  for (const Json& value : *found) {
    ISOBIT_ASSIGN_OR_RETURN(std::string text,
                            StringOf(value, absl::StrCat(place, "[", strings.size(), "]")));
    strings.push_back(std::move(text));
  }
  return strings;
}

absl::StatusOr<TokenHash> TokenHashOf(const std::string& hex, const std::string& where) {
  TokenHash hash;
  const bool is_hex = std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit);
  if (!is_hex || hex.size() != 2 * hash.size()) {
    return Expected(where, "the SHA-256 of a token, 64 hex digits");
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), hash.begin());
  return hash;
}

absl::StatusOr<RoleSet> RolesOf(const std::vector<std::string>& names, const std::string& where) {
  if (names.empty()) return Expected(where, "at least one role");
  RoleSet roles;
  for (const std::string& name : names) {
    const std::optional<CallerRole> role = RoleOfName(name);
    if (!role) {
      return Expected(where,
                      absl::StrCat("generate, score, compare, watch or admin, got ", Quoted(name)));
    }
    roles.Add(*role);
  }
  return roles;
}

absl::StatusOr<AccessClient> ClientOf(const Json& json, const std::string& where) {
  if (!json.is_object()) return Expected(where, "an object");
  for (const auto& item : json.items()) {
    const std::string& key = item.key();
    if (key != "name" && key != "roles" && key != "token_sha256" && key != "certificates") {
      return Expected(where,
                      absl::StrCat("name, roles, token_sha256 or certificates, got ", Quoted(key)));
    }
  }
  AccessClient client;
  const auto name = json.find("name");
  if (name == json.end()) return Expected(where, "a name");
  ISOBIT_ASSIGN_OR_RETURN(client.name, StringOf(*name, absl::StrCat(where, ".name")));
  ISOBIT_ASSIGN_OR_RETURN(const auto roles, StringsOf(json, "roles", where));
  ISOBIT_ASSIGN_OR_RETURN(client.roles, RolesOf(roles, absl::StrCat(where, ".roles")));
  ISOBIT_ASSIGN_OR_RETURN(const auto hashes, StringsOf(json, "token_sha256", where));
  for (const std::string& hex : hashes) {
    ISOBIT_ASSIGN_OR_RETURN(const TokenHash hash,
                            TokenHashOf(hex, absl::StrCat(where, ".token_sha256")));
    client.tokens.push_back(hash);
  }
  ISOBIT_ASSIGN_OR_RETURN(client.certificates, StringsOf(json, "certificates", where));
  if (client.tokens.empty() && client.certificates.empty()) {
    return Expected(where, "token_sha256 or certificates");
  }
  return client;
}

// No two clients may have the same name, bearer token or certificate.
absl::Status CheckDistinct(const std::vector<AccessClient>& clients, const std::string& source) {
  std::set<std::string> names, certificates;
  std::set<TokenHash> tokens;
  for (const AccessClient& client : clients) {
    bool is_new = names.insert(client.name).second;
    for (const TokenHash& token : client.tokens) is_new &= tokens.insert(token).second;
    for (const auto& name : client.certificates) is_new &= certificates.insert(name).second;
    if (is_new) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": client ", Quoted(client.name),
                     ": its name, a token or a certificate occurs twice"));
  }
  return absl::OkStatus();
}

}  // namespace

bool SameSecret(absl::string_view shown, absl::string_view secret) {
  const TokenHash a = HashOf(shown), b = HashOf(secret);
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::StatusOr<AccessList> AccessList::Parse(absl::string_view text, const std::string& source) {
  ISOBIT_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(text, source));
  const auto clients = json.find("clients");
  if (json.size() != 1 || clients == json.end() || !clients->is_array()) {
    return Expected(source, "one field, the array \"clients\"");
  }
  AccessList list;
  for (const Json& client : *clients) {
    const std::string where = absl::StrCat(source, ": clients[", list.clients_.size(), "]");
    ISOBIT_ASSIGN_OR_RETURN(AccessClient parsed, ClientOf(client, where));
    list.clients_.push_back(std::move(parsed));
  }
  ISOBIT_RETURN_IF_ERROR(CheckDistinct(list.clients_, source));
  return list;
}

const AccessClient* AccessList::ByToken(absl::string_view token) const {
  const TokenHash hash = HashOf(token);
  const AccessClient* found = nullptr;
  for (const AccessClient& client : clients_) {
    for (const TokenHash& own : client.tokens) {
      // The loops have no early exit, so that a right token and a wrong one take the same time.
      if (CRYPTO_memcmp(own.data(), hash.data(), hash.size()) == 0) found = &client;
    }
  }
  return found;
}

const AccessClient* AccessList::ByCertificate(absl::Span<const std::string> names) const {
  for (const AccessClient& client : clients_) {
    for (const std::string& own : client.certificates) {
      if (std::find(names.begin(), names.end(), own) != names.end()) return &client;
    }
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<AccessFile>> AccessFile::Open(std::string path) {
  std::shared_ptr<AccessFile> file(new AccessFile(std::move(path)));
  const std::lock_guard lock(file->mutex_);
  ISOBIT_RETURN_IF_ERROR(file->Load());
  return file;
}

std::shared_ptr<const AccessList> AccessFile::Current() {
  const std::lock_guard lock(mutex_);
  if (StampOf(path_) != stamp_) {
    const std::shared_ptr<const AccessList> old = list_;
    if (const absl::Status loaded = Load(); loaded.ok()) {
      if (list_ != old)
        ISOBIT_LOG(Info) << "--access_file " << path_ << " has changed: " << list_->num_clients()
                         << " clients from now on";
    } else {
      ISOBIT_LOG(Error) << "the old access list stays in force, because the file has changed and "
                        << loaded.message();
    }
  }
  return list_;
}

absl::Status AccessFile::Load() {
  stamp_ = StampOf(path_);
  ISOBIT_ASSIGN_OR_RETURN(std::string text, ReadSmallFile("--access_file", path_));
  if (text == text_) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(AccessList list,
                          AccessList::Parse(text, absl::StrCat("--access_file ", path_)));
  list_ = std::make_shared<const AccessList>(std::move(list));
  text_ = std::move(text);
  return absl::OkStatus();
}

}  // namespace isobit
