//go:build tls

package main

import (
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// The version of the client in tls.mod speaks TLS, and takes any certificate.
var (
	consumersConnect = []consumer.Option{consumer.WithTls(true)}
	producersConnect = []producer.Option{producer.WithTls(true)}
)
